"""Every knob, and the arithmetic over knobs. Never imports torch."""
