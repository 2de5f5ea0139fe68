"""Use of recipes in the training loops of other libraries. Each module is for one library, which it imports."""
