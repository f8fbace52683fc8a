"""Computed KV as blocks: cut from a row, named by content, kept in memory and on SSD, restored.

Nothing here knows the engine or the journal; the loop brings them together. `naming`, `fileformat`,
`files`, `store`, `reconcile` and `writers` work without mlx.
"""
