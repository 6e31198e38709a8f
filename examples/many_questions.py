"""Several questions about one document whose KV is computed once and stays in the cache.

Run: python examples/many_questions.py [MODEL]
"""

import sys
import time

import torch

import longreach
from longreach.tasks.haystack import paragraphs

FACTS = {"archive": "4815162", "barn": "2342108", "tower": "1618033"}

model, tokenizer = longreach.load(sys.argv[1] if len(sys.argv) > 1 else "mini")
facts = [f"The access code for the {place} is {code}." for place, code in FACTS.items()]
parts = [part for pair in zip(paragraphs()[8:], facts, strict=False) for part in pair]
document = tokenizer("\n\n".join(parts) + "\n\n", return_tensors="pt").input_ids

with longreach.attach(model) as session, torch.no_grad():
    cache = session.new_cache()
    start = time.perf_counter()
    model(document, past_key_values=cache)
    print(f"read {document.shape[1]} tokens in {time.perf_counter() - start:.2f} s")
    for place in FACTS:
        question = f"Question: What is the access code for the {place}?\nAnswer:"
        ids = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        start = time.perf_counter()
        out = model.generate(torch.cat([document, ids], 1), past_key_values=cache, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(out[0, document.shape[1] + ids.shape[1] :], skip_special_tokens=True)
        print(f"{place}: {answer.strip()} ({time.perf_counter() - start:.2f} s)")
        cache.crop(document.shape[1] - cache.get_seq_length())  # forget question and answer, keep the document
