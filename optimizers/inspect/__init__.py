"""Reports about an optimizer: routes and bytes of its parameters, and measurements of its stages and their state."""
