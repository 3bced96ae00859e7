"""``python -m cachelink_bench.recall_pair``."""

from cachelink_bench.recall_pair.cli import app

if __name__ == "__main__":
    app()
