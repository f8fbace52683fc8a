"""The same requests through the same policy with another configuration: the engine and the disk are
replaced by a cost model that is fitted to what a journal has recorded of them.
"""
