"""``python -m cachelink_core.cli``."""

from cachelink_core.cli.app import main

if __name__ == "__main__":
    main()
