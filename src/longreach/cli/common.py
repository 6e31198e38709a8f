"""Arguments that several verbs share, and what they mean."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.values import value_of

if TYPE_CHECKING:
    import torch

    from longreach.cache import CacheConfig

PASS_TOKENS = 512  # prompt tokens per pass, by default: short enough for a progress bar to move
HOST_PASS_TOKENS = 4096  # the same with --host, where each pass copies the keys and values before it to the GPU
FAILED = 3  # exit code where a part of what was measured failed with an error of its own


def exit_code(failed: int, what: str, output: Path | None) -> int:
    """0, or FAILED with a line on stderr if `failed` answers or windows failed."""
    if not failed:
        return 0
    again = "" if output is None else "; the same command measures them again, and keeps the rest"
    print(f"longreach: {failed} {what} failed with an error{again}", file=sys.stderr)
    return FAILED


def add_command(
    commands: argparse._SubParsersAction[Any], name: str, help_text: str, examples: Iterable[str] = ()
) -> argparse.ArgumentParser:
    """The parser of a verb or subcommand, with its description and examples."""
    lines = "".join(f"\n  {line}" for line in examples)
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".", allow_abbrev=False,
        epilog=f"examples:{lines}" if lines else None,
        formatter_class=argparse.RawDescriptionHelpFormatter if lines else argparse.HelpFormatter,
    )  # fmt: skip
    return made


def positive(text: str) -> int:
    """An argument that is a count of at least 1."""
    return _at_least(1, text)


def count(text: str) -> int:
    """An argument that is a count, of 0 or more."""
    return _at_least(0, text)


UNITS = {"": 1, "B": 1, **{u: 1000**n for n, u in enumerate(("KB", "MB", "GB", "TB"), 1)},
         **{u: 1024**n for n, u in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)}}  # fmt: skip


def byte_size(text: str) -> int:
    """An argument that is a number of bytes, such as 800000, 500MB, 1.5GB or 2GiB; at least 1."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    value = int(float(found[1]) * UNITS.get(found[2].upper(), 0)) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 2GiB, got {text!r}")
    return value


def seed(text: str) -> int:
    """An argument that seeds torch's generators: a whole number of 64 bits without a sign."""
    value = count(text)
    if value >= 1 << 64:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**64, got {text!r}")
    return value


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return value


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """--model, --device, --dtype."""
    parser.add_argument("--model", required=required, metavar="DIR|mini",
                        help="a model directory in transformers' format, or 'mini', the one shipped")  # fmt: skip
    add_device(parser)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                        help="auto (default): float32 on the CPU, the checkpoint's own elsewhere")  # fmt: skip


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: cuda if there is a GPU)")


def add_methods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", action="append", default=[], metavar="SPEC", help="'[PREFILL/]DECODE "
                        "[option=value ...] [prefill.option=value ...]', may be given several times; dense is always "
                        "there")  # fmt: skip


def add_slot_settings(parser: argparse.ArgumentParser) -> None:
    """--set SLOT.OPTION=VALUE."""
    parser.add_argument("--set", action="append", default=[], metavar="SLOT.OPTION=VALUE", help="an option of each "
                        "fuse or evict method given that has it and does not set it: fuse.ratio=0.3")  # fmt: skip


def add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, action="append", metavar="FILE",
                        help="UTF-8 text, cut into windows; may be given several times")  # fmt: skip


def refuse_repeated(option: str, given: Iterable[str]) -> None:
    """Raise InvalidInput for a value of an option that is given more than once."""
    counts = Counter(" ".join(value.split()) for value in given)
    for value, count in counts.items():
        if count > 1:
            raise InvalidInput(f"{option}: {value!r} is given {count} times; give it once")


def add_task_prompts(parser: argparse.ArgumentParser, tasks: str, samples: int) -> None:
    """--tasks, --length, --samples, with the verb's default tasks and number of prompts."""
    parser.add_argument("--tasks", default=tasks, metavar="A,B", help=f"as in longreach eval (default {tasks})")
    add_length(parser)
    parser.add_argument("--samples", type=positive, default=samples, metavar="N",
                        help=f"prompts of each task (default {samples})")  # fmt: skip


def add_length(parser: argparse.ArgumentParser) -> None:
    """--length, of prompts that end with a question."""
    parser.add_argument("--length", type=positive, default=4096, metavar="N",
                        help="tokens of a prompt, with room for its answer (default 4096)")  # fmt: skip


def add_chunk_size(parser: argparse.ArgumentParser, default: int | None = PASS_TOKENS, more: str = "") -> None:
    """--prefill-chunk-size. default: None for verbs that find theirs, as `more` says in the help."""
    parser.add_argument("--prefill-chunk-size", type=positive, default=default, metavar="N",
                        help=f"prompt tokens per pass (default {PASS_TOKENS}{more}); fewer take less "
                        "memory")  # fmt: skip


def pass_tokens(args: argparse.Namespace) -> int:
    """--prefill-chunk-size, or its default."""
    given: int | None = args.prefill_chunk_size
    return given or (HOST_PASS_TOKENS if args.host else PASS_TOKENS)


def add_host(parser: argparse.ArgumentParser) -> None:
    """--host, --device-memory and --host-attend."""
    parser.add_argument("--host", action="store_true", help="keep keys and values in host memory, but for layers that "
                        "the decode method reads whole; the GPU reads chosen keys over the link")  # fmt: skip
    parser.add_argument("--device-memory", type=byte_size, metavar="SIZE", help="with --host: the most GPU memory for "
                        "keys, values and the staging of prompts, such as 4GB; as many layers as fit stay there. The "
                        "tables and other data of a method are not limited by it")  # fmt: skip
    parser.add_argument("--host-attend", choices=("auto", "link", "cpu"), help="with --host: who computes attention to "
                        "them, the GPU over the link or the CPU (default auto: the faster one, measured)")  # fmt: skip


def cache_config(args: argparse.Namespace) -> CacheConfig:
    """The cache that --host, --device-memory and --host-attend ask for, without a capacity. Raises InvalidInput."""
    from longreach.cache import CacheConfig

    if args.device_memory is not None and not args.host:
        raise InvalidInput("--device-memory limits the GPU memory that keys and values take with --host; give --host")
    if args.host_attend is not None and not args.host:
        raise InvalidInput("--host-attend is for keys and values in host memory; give --host")
    return CacheConfig(host=args.host, device_bytes=args.device_memory, host_attend=args.host_attend or "auto")


def host_config(args: argparse.Namespace) -> dict[str, Any]:
    """A record's entries on keys and values in host memory; none where they are in GPU memory."""
    if not args.host:
        return {}
    attend = {} if args.host_attend is None else {"host_attend": args.host_attend}
    return {"host": True, "device_memory": args.device_memory, **attend}


def add_graph(parser: argparse.ArgumentParser) -> None:
    """--no-graph, as graph: None or False."""
    parser.add_argument("--no-graph", dest="graph", action="store_const", const=False, help="on a GPU: run the decode "
                        "step uncompiled, not as one CUDA graph: slower, but sooner ready")  # fmt: skip


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer) as the arguments ask for."""
    import torch

    from longreach.adapters.transformers import device_of, load

    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    return load(args.model, device=str(device_of(args.device)), dtype=dtype)


def warn_unapplied(settings: dict[str, Any]) -> None:
    """One line on stderr: what of the checkpoint's generation config, by name, answers are made without."""
    if settings:
        told = ", ".join(f"{name}={value}" for name, value in settings.items())
        print(f"longreach: of the model's generation config these are not applied: {told}", file=sys.stderr)


def tell_compiled(config: CacheConfig, device: torch.device, new: int) -> None:
    """One line on stderr where the first answer, of `new` tokens, waits for kernels that the CPU attends with."""
    from longreach.adapters.transformers.loop.host_attend import LEAST
    from longreach.ops.impl import has_numba

    used = config.host_attend == "cpu" or (config.host_attend == "auto" and new >= LEAST)
    if config.host and used and device.type == "cuda" and has_numba():
        print(
            "longreach: the first answer on a machine compiles attention on the CPU, for up to a minute; --host-attend "
            "link avoids this",
            file=sys.stderr,
        )


def tell_left_out(methods: dict[str, str]) -> None:
    """One line on stderr for each method that is not measured, with the reason."""
    for name, why in methods.items():
        print(f"longreach: {name} is left out: {why}", file=sys.stderr)


def read_text(path: str, given: str) -> tuple[str, str]:
    """How to call a file, or standard input for "-", and its text as it is; a byte order mark is no text.

    given: where the path came from, "to --document". Raises InvalidInput with the remedy.
    """
    name = "standard input" if path == "-" else path
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return name, content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{name} is not UTF-8 text (byte {error.start}); convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise InvalidInput(f"cannot read {name}: {error.strerror}; check the path given {given}") from error


def read_whole(path: str, given: str) -> str:
    """The text of a file as it is, which must hold some; as `read_text`."""
    name, text = read_text(path, given)
    if not text.strip():
        raise InvalidInput(f"{name} is empty; leave it out, or give a file with text in it")
    return text


def read_system(path: str) -> str:
    """The system prompt of documents, as all verbs understand --system; white space at its end is no part of it."""
    return read_whole(path, "to --system").rstrip()


def read_document(path: str) -> str:
    """The text of a file, or of standard input for "-". Raises InvalidInput with the remedy."""
    name, text = read_text(path, "to --document")
    if not text.strip():
        raise InvalidInput(f"the document {name} is empty; give one with text in it")
    return text.replace("\r\n", "\n")


def check_questions(questions: Iterable[str]) -> None:
    """Raise InvalidInput for an empty question, before anything is loaded."""
    if not all(question.strip() for question in questions):
        raise InvalidInput("a --question is empty; ask something")


def parse_settings(settings: Iterable[str], kind: str, known: Iterable[str]) -> dict[str, dict[str, Any]]:
    """["decode.window=0.3"] -> {"decode": {"window": 0.3}}; kind: what stands before the dot, known: its names.

    Values are JSON (numbers, true, false, null, "text", [1, 2]), Python's True, False and None, or plain words.
    Raises InvalidInput for what is no setting or set twice, UnknownName for an unknown name before the dot.
    """
    options: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        owner, dot, option = name.strip().partition(".")
        if not (equals and dot and owner and option and value.strip()):
            raise InvalidInput(f"--set {setting}: expected {kind.upper()}.OPTION=VALUE, such as decode.window=0.3")
        if owner not in known:
            raise UnknownName(f"{kind} in --set", owner, known)
        if option in options.setdefault(owner, {}):
            raise InvalidInput(f"--set {setting}: {owner}.{option} is set twice; keep one of them")
        options[owner][option] = value_of(value.strip(), "--set")
    return options
