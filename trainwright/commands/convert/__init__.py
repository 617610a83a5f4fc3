"""``convert``: turns the settings of another trainer into a recipe, and names each key that it could not take."""
