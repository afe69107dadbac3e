"""What verbs print: tables of data, masks, rewards and plans."""
