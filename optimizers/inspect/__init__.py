"""What an optimizer tells of itself: routes and bytes, and what its stages do and their state is like."""
