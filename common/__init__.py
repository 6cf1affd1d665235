"""What an engine is made of. Nothing here imports from above."""
