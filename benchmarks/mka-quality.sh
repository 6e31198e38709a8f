#!/usr/bin/env bash
# Quality of MKA's variants and of its baselines on longreach-mini: each is converted, healed on the same tokens of the
# recipe, and evaluated before and after: RULER, and perplexity by position on text that the model has not seen. Two
# records each, and one of the weights that the router gives after healing, in OUT. What is there already is not done
# again.
#
#   longreach train mini --prepare DATA --tokenizer src/longreach/models/longreach-mini    # once, needs the extra corpus
#   DATA=data OUT=results benchmarks/mka-quality.sh [NAME ...]                              # all variants, or these
#
# 20M tokens by default: STEPS updates of 4 batches of 65,536 tokens; -long: five times as many. block-drawn is healed
# with windows and numbers of recalled blocks drawn for each update, and then read at each of BUDGETS (window:blocks;
# 256 blocks are all of 16K).
set -euo pipefail
: "${DATA:?the folder that --prepare has made}" "${OUT:?a folder for the records}"
STEPS=${STEPS:-76} LENGTHS=${LENGTHS:-16384,8192,4096,16384} BATCH=${BATCH:-65536} ACCUMULATE=${ACCUMULATE:-4}
SAMPLES=${SAMPLES:-50} PREFILL=${PREFILL:-2048} EVALUATE=${EVALUATE:-4096,16384}
MODELS=${MODELS:-$OUT/models} WORKERS=${WORKERS:-4}
TEXT=${TEXT:-src/longreach/tasks/haystack/haystack.txt} TEXT_LENGTH=${TEXT_LENGTH:-16384}
DRAWN=${DRAWN:-128:2,128:8,512:4,512:8,512:32,512:256} BUDGETS=${BUDGETS:-128:2 128:8 512:2 512:8 512:32 512:256}

declare -A VARIANTS=(
  [mha]="mha" [gqa-2]="gqa kv_heads=2" [mqa]="mqa" [mla]="mla"
  [fastmka]="fastmka" [fastmka-3]="fastmka tiers=[1,2,3]" [fastmka-fixed]="fastmka routing=fixed"
  [fastmka-top1]="fastmka routing=top1" [fastmka-top2]="fastmka tiers=[1,2,3] routing=top2"
  [mka]="mka recall=summary" [mka-2]="mka tiers=[1,2]"
  [mka-gated]="mka mode=gated recall=summary" [block]="block_mka recall=summary"
  [block-bounds]="block_mka recall=bounds" [block-hash]="block_mka recall=hash"
  [block-bounds-long]="block_mka recall=bounds" [block-index]="block_mka recall=index"
  [block-local]="block_mka tiers=[1,2]" [block-drawn]="block_mka recall=bounds"
)
ORDER=(mha gqa-2 mqa mla fastmka fastmka-3 mka mka-gated block block-bounds block-hash block-index block-local
  block-drawn block-bounds-long
  fastmka-fixed fastmka-top1 fastmka-top2 mka-2)

mkdir -p "$OUT" "$MODELS"
measure() { # model folder, name of the records
  local part="$OUT/part-$2.json.gz" # a record with answers that failed does not count as there
  [ -s "$OUT/mini-mka-$2.json.gz" ] || { longreach eval --model "$1" --tasks ruler --length "$EVALUATE" \
    --samples "$SAMPLES" --workers "$WORKERS" ${EVAL_BATCH:+--batch "$EVAL_BATCH"} --prefill-chunk-size "$PREFILL" \
    --method dense --output "$part" && mv "$part" "$OUT/mini-mka-$2.json.gz"; }
  [ -s "$OUT/mini-mka-$2-perplexity.json" ] || longreach perplexity --model "$1" --text "$TEXT" \
    --length "$TEXT_LENGTH" --decode-tokens 0 --prefill-chunk-size "$PREFILL" --output "$OUT/mini-mka-$2-perplexity.json"
}
at_budget() { # model folder, window, blocks -> a folder that reads the same weights at this budget
  local folder=$1-$2-$3
  mkdir -p "$folder" && cp "$1"/*.json "$1"/*.safetensors "$folder"
  python3 - "$folder/config.json" "$2" "$3" << 'EOF'
import json, sys
name, window, blocks = sys.argv[1:]
with open(name) as file:
    config = json.load(file)
config["mka"].update(window=int(window), blocks=int(blocks))
with open(name, "w") as file:
    json.dump(config, file, indent=2)
EOF
  echo "$folder"
}
for name in "${@:-${ORDER[@]}}"; do
  read -ra variant <<< "${VARIANTS[$name]:?no variant of this name}"
  folder=$MODELS/$name
  [ -d "$folder" ] || longreach mka convert mini "${variant[@]}" --out "$folder"
  if [ "$name" = block-index ] && [ ! -d "$folder-trained" ]; then
    longreach mka index "$folder" --out "$folder-trained" --length 4096
  fi
  [ ! -d "$folder-trained" ] || folder=$folder-trained
  case $name in
    block-drawn | *-long) ;; # before healing they are block-bounds
    gqa* | mqa | mla | block*) measure "$folder" "$name" ;;
    *) ;; # before healing they are the original, bit for bit or up to rounding
  esac
  if [ ! -s "$folder-healed/config.json" ]; then
    resume=() draw=()
    [ "$name" != block-drawn ] || draw=(--draw-budget "$DRAWN")
    [ ! -e "$folder-healed/training-state.safetensors" ] || resume=(--resume)
    steps=$STEPS
    [[ $name != *-long ]] || steps=$((5 * STEPS))
    longreach mka train "$folder" --teacher mini --kl 1 --nll 1 --out "$folder-healed" --data "$DATA" --steps "$steps" --lengths "$LENGTHS" \
      --batch-tokens "$BATCH" --accumulate "$ACCUMULATE" --workers "$WORKERS" "${draw[@]}" "${resume[@]}"
  fi
  if [ "$name" = block-drawn ]; then
    for budget in $BUDGETS; do
      measure "$(at_budget "$folder-healed" "${budget%:*}" "${budget#*:}")" "$name-healed-${budget/:/-}"
    done
  else
    measure "$folder-healed" "$name-healed"
  fi
  case ${variant[0]} in
    fastmka | mka | block_mka)
      [ -s "$OUT/mini-mka-$name-routing.json" ] || longreach mka routing "$folder-healed" --text "$TEXT" \
        --length "$TEXT_LENGTH" --output "$OUT/mini-mka-$name-routing.json" ;;
  esac
done
