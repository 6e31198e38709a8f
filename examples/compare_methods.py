"""What each method reads, layer by layer, for the same prompt and answer.

Run: python examples/compare_methods.py [MODEL]
"""

import sys

import longreach
from longreach import OracleTopK, StreamingLLM
from longreach.tasks.haystack import paragraphs

model, tokenizer = longreach.load(sys.argv[1] if len(sys.argv) > 1 else "mini")
text = "\n\n".join(paragraphs()[:8])
inputs = tokenizer(f"{text}\n\nThe code for the barn is 4815162.\n\nThe code for the barn is", return_tensors="pt")

for method in (None, StreamingLLM(window=64), StreamingLLM(window=0.1), OracleTopK(k=0.1)):
    with longreach.attach(model, decode=method) as session:
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    print(f"{method or 'dense'}: {answer!r}, {session.report().fraction('decode'):.1%} of dense attention's bytes")

print(session.report())  # the last method's, per layer and phase
