"""Frozen: what chapters 07 and 08 stand on until each is rebuilt on the engine of chapter 02. Nothing new imports from here."""
