"""The recipe, the declaration of an optimizer: its fields, routes and roles, files and overrides, shipped recipes."""
