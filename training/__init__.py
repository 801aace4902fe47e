"""How a cell is trained: identity, replay, the trainer, folders and the store."""
