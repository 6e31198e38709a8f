"""Task generators: text in which the answer to a question is hidden."""
