"""Training text and evaluation haystack, from what pinned Python packages bring.

Prose is every longer string literal (docstrings, mostly) of the listed packages, and botocore's descriptions of
services; code is the standard library's and PyTorch's source. Half of the modules of some packages are held out for
the haystack, which keeps only readable paragraphs; what shares 64 characters with it leaves the training text, which
is then checked again as a whole.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import html
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from longreach.errors import LongreachError
from longreach.train.mini.overlap import WINDOW, OverlapIndex, normalise

PACKAGES = {  # name: licence of its own Python sources
    "cpython": "PSF-2.0",
    "numpy": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "sympy": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "matplotlib": "PSF-based (Matplotlib)",
    "mpmath": "BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    "scikit-learn": "BSD-3-Clause",
    "scikit-image": "BSD-3-Clause",
    "pandas": "BSD-3-Clause",
    "statsmodels": "BSD-3-Clause",
    "sqlalchemy": "MIT",
    "astropy": "BSD-3-Clause",
    "xarray": "Apache-2.0",
    "nltk": "Apache-2.0",
    "botocore": "Apache-2.0",
}
INSTALL = "pip install 'longreach[corpus]'"
IMPORTED_AS = {"scikit-learn": "sklearn", "scikit-image": "skimage"}
HELD_OUT = ("cpython", "numpy", "sympy", "networkx")  # half of their modules go to the haystack
CODE = {"cpython": 12_000_000, "torch": 12_000_000}  # characters of source taken as code
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "lib2to3", "encodings", "_vendor", "__pycache__"}


@dataclass
class Corpus:
    """Texts by kind, and where they came from."""

    prose: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    haystack: list[str] = field(default_factory=list)  # paragraphs, each one line
    manifest: dict[str, Any] = field(default_factory=dict)


def package_root(name: str) -> Path:
    """Folder of a package's sources."""
    if name == "cpython":
        return Path(sysconfig.get_path("stdlib"))
    spec = util.find_spec(IMPORTED_AS.get(name, name))
    if spec is None or not spec.submodule_search_locations:
        raise LongreachError(f"the corpus needs the package {name}; install it ({INSTALL})")
    return Path(next(iter(spec.submodule_search_locations)))


def package_files(name: str) -> list[tuple[str, str]]:
    """(path within the package, text) of every Python file in it, sorted by path, tests left out."""
    root = package_root(name)
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            try:
                files.append((relative.as_posix(), path.read_text(encoding="utf-8")))
            except UnicodeDecodeError:
                continue  # a handful of stdlib files are in other encodings
    return files


def descriptions(package: str) -> Iterator[tuple[str, str]]:
    """(path, text) of what a package's compressed JSON service models say in their fields "documentation"."""
    root = package_root(package)
    for path in sorted(root.rglob("service-2.json.gz")):
        found: list[str] = []

        def collect(fields: dict[str, Any], found: list[str] = found) -> dict[str, Any]:
            text = fields.get("documentation")
            if isinstance(text, str):
                found.append(without_tags(text))
            return fields

        json.loads(gzip.decompress(path.read_bytes()), object_hook=collect)
        short = [text for text in found if len(text) < 160]  # of a field each: together they read as a list
        yield path.relative_to(root).as_posix(), "\n\n".join(text for text in found if len(text) >= 160)
        yield path.relative_to(root).as_posix(), "\n".join(short)


def without_tags(text: str) -> str:
    """HTML as plain text: paragraphs and list items on lines of their own."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"</?(p|note|important|ul|ol|dl|h\d|div|table|tr|br|pre)\b[^>]*>", "\n\n", text)
    text = re.sub(r"<(li|dt|dd)\b[^>]*>", "\n- ", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    text = re.sub(r"-[ \n]+(?=\S)", "- ", re.sub(r" *\n *", "\n", text))
    return tidy(text)


def is_held_out(package: str, path: str, topic: str = "") -> bool:
    """Whether a module (or one topic of pydoc_data/topics.py) belongs to the haystack; fixed by its name's hash."""
    if package not in HELD_OUT:
        return False
    return hashlib.sha256(f"{package}/{path}#{topic}".encode()).digest()[0] % 2 == 0


def documents(package: str, path: str, text: str) -> Iterator[tuple[str, str]]:
    """(topic, cleaned text) of the longer string literals of one file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    if path == "pydoc_data/topics.py":
        for topic, body in ast.literal_eval(tree.body[-1].value).items():  # type: ignore[attr-defined]
            yield topic, tidy(body)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= 160:
            yield "", tidy(inspect.cleandoc(node.value))


def tidy(text: str) -> str:
    """Uniform line ends, no tabs, no trailing blanks, at most one empty line, no blank start."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    text = "".join(c for c in text if c == "\n" or c.isprintable())
    text = re.sub(r"[ ]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def is_prose(paragraph: str) -> bool:
    """A readable paragraph: sentences of words, not a table, a signature or an example."""
    line = " ".join(paragraph.split())
    if not (100 <= len(line) <= 1500) or paragraph[0].isspace() or not line[0].isupper() or line[-1] not in ".!?":
        return False
    letters = sum(c.isalpha() or c == " " for c in line)
    return letters / len(line) > 0.92 and not re.search(r">>>|::|-{3,}|\\|\||[*`_=<>{}\[\]]{2}|^\W", line)


def unwrap(document: str) -> str:
    """The document with its prose paragraphs put on one line each."""
    blocks = document.split("\n\n")
    return "\n\n".join(" ".join(b.split()) if b and is_prose(b) else b for b in blocks)


def build(
    limit_files: int | None = None,
    packages: Sequence[str] = tuple(PACKAGES),
    say: Callable[[str], None] = print,
    held_out: Sequence[str] = (),
) -> Corpus:
    """Collect, split, clean and check the corpus. Deterministic for given package versions.

    Args:
        limit_files: at most this many files of each package (for tests); None means all.
        packages: which of PACKAGES are read.
        held_out: further paragraphs that the training text shall not overlap with.
        say: called with each step of the work.
    """
    missing = [name for name in packages if name != "cpython" and not util.find_spec(IMPORTED_AS.get(name, name))]
    if missing:
        raise LongreachError(f"the corpus needs the packages {', '.join(missing)}; install them ({INSTALL})")
    corpus = Corpus()
    prose: list[str] = []
    code: list[str] = []
    seen_haystack: set[str] = set()
    sources, collected = [], dict[str, int]()
    for package in packages:
        say(f"reading {package}")
        files = package_files(package)[:limit_files]
        version = metadata.version(package) if package != "cpython" else ".".join(map(str, sys.version_info[:3]))
        digest, code_chars, before = hashlib.sha256(), 0, sum(map(len, prose))
        if package == "botocore":
            files = list(descriptions(package))[:limit_files]
            prose += [text for _, text in files if text]
        for path, text in files:
            digest.update(text.encode("utf-8", "surrogatepass"))
            for topic, document in documents(package, path, text) if path.endswith(".py") else ():
                if is_held_out(package, path, topic):
                    for block in document.split("\n\n"):
                        if block and is_prose(block) and normalise(block) not in seen_haystack:
                            seen_haystack.add(normalise(block))
                            corpus.haystack.append(" ".join(block.split()))
                elif len(document) >= 160:
                    raw = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()[0] % 5 < 2
                    prose.append(document if raw else unwrap(document))  # two in five keep their line breaks
            if code_chars < CODE.get(package, 0) and path != "pydoc_data/topics.py" and not is_held_out(package, path):
                code.append(tidy(text))
                code_chars += len(text)
        sources.append(
            {
                "package": package,
                "version": version,
                "licence": PACKAGES[package],
                "files": len(files),
                "sha256": digest.hexdigest(),
            }
        )
        collected[package] = sum(map(len, prose)) - before
    say("leaving out what repeats, and what the haystack holds")
    for blocks in (prose, code):
        Random("order").shuffle(blocks)
    index = OverlapIndex(["\n\n".join(corpus.haystack), "\n\n".join(held_out)])
    corpus.prose, dropped_prose = without_overlap(unrepeated(prose), index)
    corpus.code, dropped_code = without_overlap(unrepeated(code), index)
    texts = {"prose": corpus.prose, "code": corpus.code}
    hits = {kind: len(index.starts("\n\n".join(parts))) for kind, parts in texts.items()}
    if any(hits.values()):
        raise LongreachError(f"training text still shares {WINDOW} characters with the haystack, at {hits} places")
    corpus.manifest = {
        "sources": sources,
        "prose_collected": collected,
        "dropped_blocks": {"prose": dropped_prose, "code": dropped_code},
        "characters": {
            "prose": sum(map(len, corpus.prose)),
            "code": sum(map(len, corpus.code)),
            "haystack": sum(map(len, corpus.haystack)),
        },
        "overlap_window": WINDOW,
        "overlap_hits": sum(hits.values()),
    }
    return corpus


def unrepeated(texts: list[str]) -> list[str]:
    """The texts without blocks (parted by empty lines) that occurred before; short leftovers vanish."""
    seen: set[bytes] = set()
    kept = []
    for text in texts:
        blocks = []
        for block in text.split("\n\n"):
            key = hashlib.sha1(normalise(block).encode("utf-8", "surrogatepass")).digest()
            if len(block) < 40 or key not in seen:
                blocks.append(block)
            seen.add(key)
        rest = "\n\n".join(blocks).strip()
        if len(rest) >= 160:
            kept.append(rest)
    return kept


def without_overlap(texts: list[str], index: OverlapIndex) -> tuple[list[str], int]:
    """The texts without the blocks that share a window with the haystack, and how many blocks went."""
    kept, dropped = [], 0
    for text in texts:
        if index.hits(text):
            blocks = text.split("\n\n")
            clean = [block for block in blocks if not index.hits(block)]
            text = "\n\n".join(clean).strip()
            if index.hits(text):  # a window reaches over the cut
                text, clean = "", []
            dropped += len(blocks) - len(clean)
        if len(text) >= 160:
            kept.append(text)
    while starts := index.starts("\n\n".join(kept)):  # windows that reach from one text into the next
        ends = np.cumsum([len(normalise(text)) + 1 for text in kept])
        first = np.asarray(starts)
        bad = set(np.searchsorted(ends, np.concatenate([first, first + WINDOW - 1]), side="right").tolist())
        kept = [text for i, text in enumerate(kept) if i not in bad]
        dropped += len(bad)
    return kept, dropped


def write_haystack(corpus: Corpus, folder: Path) -> None:
    """Write haystack.txt (paragraphs parted by an empty line) and haystack.json (hash, sources, licences)."""
    data = ("\n\n".join(corpus.haystack) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "haystack.txt").write_bytes(data)
    about = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "paragraphs": len(corpus.haystack),
        "sources": [s for s in corpus.manifest["sources"] if s["package"] in HELD_OUT],
        "selection": "readable paragraphs of the docstrings and topics of half of the modules, by name's hash",
    }
    (folder / "haystack.json").write_text(json.dumps(about, indent=1) + "\n")
