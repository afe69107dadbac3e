"""What devices do in a second, and what they are: stated, guessed or measured."""
