"""For tests only: input factories, tiny models, ranks. It may import anything; nothing imports it."""
