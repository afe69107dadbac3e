"""Turns records into documents, by kind: texts, chats, preferences, pairs, labelled texts."""
