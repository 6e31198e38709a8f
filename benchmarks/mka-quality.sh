#!/usr/bin/env bash
# Quality of MKA's variants and of its baselines on longreach-mini: each is converted, healed on the same tokens of the
# recipe, and evaluated before and after. One record each, in OUT. What is there already is not done again.
#
#   longreach train mini --prepare DATA --tokenizer src/longreach/models/longreach-mini    # once, needs the extra corpus
#   DATA=data OUT=results benchmarks/mka-quality.sh [NAME ...]                              # all variants, or these
#
# 20M tokens by default: STEPS updates of 4 batches of 65,536 tokens.
set -euo pipefail
: "${DATA:?the folder that --prepare has made}" "${OUT:?a folder for the records}"
STEPS=${STEPS:-76} LENGTHS=${LENGTHS:-16384,8192,4096,16384} BATCH=${BATCH:-65536} ACCUMULATE=${ACCUMULATE:-4}
SAMPLES=${SAMPLES:-50} EVALUATE=${EVALUATE:-4096,16384} MODELS=${MODELS:-$OUT/models}

declare -A VARIANTS=(
  [mha]="mha" [gqa-2]="gqa kv_heads=2" [mqa]="mqa" [mla]="mla"
  [fastmka]="fastmka" [fastmka-3]="fastmka tiers=[1,2,3]" [fastmka-fixed]="fastmka routing=fixed"
  [fastmka-top1]="fastmka routing=top1" [fastmka-top2]="fastmka tiers=[1,2,3] routing=top2" [mka]="mka" [mka-2]="mka tiers=[1,2]"
  [mka-gated]="mka mode=gated" [block]="block_mka" [block-bounds]="block_mka recall=bounds" [block-hash]="block_mka recall=hash"
  [block-index]="block_mka recall=index" [block-local]="block_mka tiers=[1,2]"
)
ORDER=(mha gqa-2 mqa mla fastmka fastmka-3 mka mka-gated block block-bounds block-hash block-index block-local
  fastmka-fixed fastmka-top1 fastmka-top2 mka-2)

mkdir -p "$OUT" "$MODELS"
measure() { # model folder, name of the record
  [ -s "$OUT/mini-mka-$2.json" ] || longreach eval --model "$1" --tasks ruler --length "$EVALUATE" --samples "$SAMPLES" \
    --method dense --output "$OUT/mini-mka-$2.json"
}
for name in "${@:-${ORDER[@]}}"; do
  read -ra variant <<< "${VARIANTS[$name]:?no variant of this name}"
  folder=$MODELS/$name
  [ -d "$folder" ] || longreach mka convert mini "${variant[@]}" --out "$folder"
  if [ "$name" = block-index ] && [ ! -d "$folder-trained" ]; then
    longreach mka index "$folder" --out "$folder-trained" --length 4096
  fi
  [ ! -d "$folder-trained" ] || folder=$folder-trained
  measure "$folder" "$name"
  if [ ! -s "$folder-healed/config.json" ]; then
    resume=()
    [ ! -e "$folder-healed/training-state.safetensors" ] || resume=(--resume)
    longreach mka train "$folder" --teacher mini --kl 1 --nll 1 --out "$folder-healed" --data "$DATA" --steps "$STEPS" --lengths "$LENGTHS" \
      --batch-tokens "$BATCH" --accumulate "$ACCUMULATE" "${resume[@]}"
  fi
  measure "$folder-healed" "$name-healed"
done
