"""Ask a question about a text file, reading 30 % of the keys and values while the answer is written.

Run: python examples/ask_a_file.py notes.txt "What is the access code for the archive?" [MODEL]

MODEL is a directory in transformers' format; without it the model shipped with longreach answers.
"""

import sys
from pathlib import Path

import longreach
from longreach import StreamingLLM

file, question, *rest = sys.argv[1:]
model, tokenizer = longreach.load(rest[0] if rest else "mini")
prompt = f"{Path(file).read_text().rstrip()}\n\nQuestion: {question}\nAnswer:"
inputs = tokenizer(prompt, return_tensors="pt")

# StreamingLLM keeps the first tokens and a recent window, so a fact near the end of the file is found
with longreach.attach(model, decode=StreamingLLM(sinks=4, window=0.3)) as session:
    out = model.generate(**inputs, max_new_tokens=32, do_sample=False, prefill_chunk_size=512)

print(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).strip())
print(f"bytes read while decoding, over dense attention's: {session.report().fraction('decode'):.1%}")
