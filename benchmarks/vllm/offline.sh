#!/usr/bin/env bash
# vLLM 0.26.0 for a GPU machine without a network that has Python 3.12, torch 2.11 for CUDA 13, torchvision and transformers.
#
#   offline.sh pack FOLDER           with pip, anywhere: parts of 24 MiB, the operator of FlashAttention-3, sums, this script
#   offline.sh install FOLDER [TO]   on that machine, from longreach's root: TO (default /tmp/vllm) gets 313 MB
#   . TO/env.sh                      there, from longreach's root: variables of processes that start an engine
#
# A dense text model with FlashAttention-3 needs no more: FlashAttention-2, experts, quantised kernels and structured output
# are left out. FOLDER/fa3.so.xz is also what LONGREACH_FA3 names, once unpacked (see ../README.md).
set -euo pipefail

VLLM=0.26.0
NEEDS="annotated-types astor blake3 cachetools cbor2 compressed-tensors==0.17.0 depyf==0.20.0 distro einops execnet
  fastapi>=0.133,<0.137 hypothesis ijson iniconfig jiter llguidance>=1.7,<1.8 loguru markdown-it-py mdurl msgspec
  openai==2.30.0 openai-harmony==0.0.8 packaging partial-json-parser pluggy prometheus-fastapi-instrumentator pybase64
  pydantic==2.14.4 pydantic_core==2.50.5 pygments pytest pytest-timeout pytest-xdist python-json-logger pyzmq rich
  setproctitle sniffio sortedcontainers starlette>=1.0.1 typing-inspection uvicorn watchfiles xxhash"
PLATFORM="--only-binary=:all: --no-deps --python-version 3.12 --implementation cp"
for glibc in 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do PLATFORM+=" --platform manylinux_${glibc}_x86_64"; done
PLATFORM+=" --platform manylinux2014_x86_64 --platform manylinux1_x86_64"

pack() {
  mkdir -p "$1"; local to; to=$(cd "$1" && pwd); work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  # shellcheck disable=SC2086
  python3 -m pip download -q $PLATFORM -d "$work/wheels" $NEEDS "vllm==$VLLM"
  mkdir "$work/vllm" "$work/tree"; python3 -m zipfile -e "$work"/wheels/vllm-*.whl "$work/vllm"; rm "$work"/wheels/vllm-*.whl
  # shellcheck disable=SC2086
  python3 -m pip install -q $PLATFORM --no-index --no-compile -t "$work/tree" "$work"/wheels/*.whl
  xz -9e -c "$work"/vllm/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so > "$to/fa3.so.xz"
  (
    cd "$work/vllm"
    find vllm -name '*.so' ! -name '_C_stable_libtorch*' ! -name 'spinloop*' ! -name 'cumem_allocator*' -delete
    rm -rf vllm/vllm-rs vllm/benchmarks vllm/third_party/{deep_gemm,fmha_sm100,tml_fa4} vllm-*.data
    find vllm -name '*.json' -delete
  )
  mkdir -p "$work/tree/xgrammar"; cat > "$work/tree/xgrammar/__init__.py" <<'STUB'
"""In place of xgrammar, which is left out: each name is a class that cannot be made."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self, *args, **options):
        raise ImportError(f"xgrammar.{name}: xgrammar is not installed")

    found = globals()[name] = type(name, (), {"__init__": refuse, "__module__": __name__})
    return found
STUB
  cp -r "$work"/vllm/vllm "$work"/vllm/vllm-$VLLM.dist-info "$work/tree/"
  (
    cd "$work/tree"; rm -rf bin
    find . -name __pycache__ -prune -exec rm -rf {} +; find . -path '*.dist-info/RECORD' -delete
    { find . -name '*.so' | sort; find . -type f ! -name '*.so' | sort; } > "$work/list"
    rm -f "$to"/part-*; tar --owner=0 --group=0 -cf - -T "$work/list" | xz -9e -c | split -b $((24 << 20)) - "$to/part-"
  )
  cp "$0" "$to/offline.sh"; (cd "$to" && sha256sum part-* fa3.so.xz > sums.txt && ls -l)
}

install() {
  local from=$1 to=${2:-/tmp/vllm} version
  version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/longreach/__init__.py)
  [ -n "$version" ] || { echo "$PWD is not longreach's root: it has no version in src/longreach/__init__.py" >&2; exit 1; }
  (cd "$from" && sha256sum -c --quiet sums.txt)
  rm -rf "$to"; mkdir -p "$to/vllm/vllm_flash_attn" "$to/longreach-$version.dist-info"
  xz -dc "$from/fa3.so.xz" > "$to/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
  cat "$from"/part-* | xz -dc | tar -C "$to" -xf - --no-same-owner
  printf 'Metadata-Version: 2.1\nName: longreach\nVersion: %s\n' "$version" > "$to/longreach-$version.dist-info/METADATA"
  printf '[vllm.general_plugins]\nlongreach = longreach.adapters.vllm:register\n' \
    > "$to/longreach-$version.dist-info/entry_points.txt"
  cat > "$to/env.sh" <<ENV
export PYTHONPATH=$to:\$PWD/src PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1 DO_NOT_TRACK=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0
# all-reduce without NVLink multicast, which not every machine allows
export VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_USE_NCCL_SYMM_MEM=0 NCCL_NVLS_ENABLE=0
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
[ -n "\${CUDA_VISIBLE_DEVICES-x}" ] || unset CUDA_VISIBLE_DEVICES # an empty one hides the GPUs from vLLM
true
ENV
  du -sh "$to"
}

case "${1:-}" in
  pack | install) [ $# -ge 2 ] || { sed -n '2,9p' "$0"; exit 2; }; "$@" ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
