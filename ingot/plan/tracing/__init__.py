"""What a rank does in a step: the build and the step of the training itself, without contents."""
