"""The doctor: findings from records alone, without torch; the same for a living run, a dead one and a foreign loop."""
