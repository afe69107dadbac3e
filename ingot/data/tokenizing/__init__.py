"""Documents into token columns: the run's tokenizer, the encoding of documents, the parts."""
