"""What of a record becomes a document, by kind: texts, chats, preferences, pairs, labelled
texts.
"""
