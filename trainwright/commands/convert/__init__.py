"""``convert``: turns the settings of another trainer into a recipe, and lists each key that has no counterpart."""
