"""Ask a question about several files whose keys and values are computed once and kept in a folder.

Run: python examples/ask_documents.py "What is the access code for the archive?" notes.txt report.txt

Run it twice: the second time all chunks come from the folder ./chunks. The model shipped with longreach answers.
"""

import sys
from pathlib import Path

import longreach
from longreach import A3Deep, ChunkStore, Documents, SnapKV

question, *files = sys.argv[1:]
model, tokenizer = longreach.load("mini")

# 15 % of the prompt's tokens are recomputed, the rest is reused; then 1,024 keys a layer are kept for the answer
with (
    longreach.attach(model, fuse=A3Deep(ratio=0.15), evict=SnapKV(capacity=1024)) as session,
    ChunkStore("chunks") as store,
):
    documents = Documents(session, tokenizer, system="Answer from the documents.", store=store)
    documents.read([Path(file).read_text() for file in files])
    print("".join(documents.ask(question, max_new_tokens=32)).strip())

account = documents.account
fusion, chunks = account.fusion, account.chunks
print(f"chunks: {chunks.stored} stored, {chunks.computed} computed")
print(f"tokens: {fusion.tokens}, of them {fusion.exact + fusion.reused} not computed again")
