"""Chats to ids by the model's own Jinja template, and which of them are trained.

`render` renders; `spans` finds the assistant's turns in one chat; `layouts` finds once what all
chats of one shape share, as far as `watch` proves it; `plan` puts the ids of many chats together.
"""
