"""What of a training can be judged before it starts. No torch; asks nobody.

Nothing here is an error: what can never work is refused by the checks of a recipe and by training.
"""
