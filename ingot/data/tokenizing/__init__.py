"""Documents into token columns: the tokenizer of a run, the encoding of documents, the parts."""
