"""What a user declares: the recipe, its routes, the files and overrides it is read from, the shipped recipes."""
