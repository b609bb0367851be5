"""How large the parts of a file may be: bounds that no honest file meets.

A file says how long its own parts are, and a few bytes can claim anything. Past these bounds a
reader stops with an error instead of taking the memory or the time that the file asks for.
"""

SAFETENSORS_HEADER = 100 * 2**20  # bytes; the format's own limit
CONFIG_JSON = 64 * 2**20  # bytes of config.json, an index, tokenizer_config.json
TOKENIZER_JSON = 512 * 2**20  # bytes; the largest vocabularies take 40 MB
DIMENSIONS = 32  # of a tensor
ELEMENTS = 2**62  # of a tensor, so that every byte offset fits 64 bits
VOCABULARY = 2**26  # rows of a head; the largest in use have 2**18
WIDTH = 2**31  # of a hidden state, a feed-forward, a context
COUNT = 2**40  # anything that a GGUF file counts
LAYERS = 10_000  # of a model; the deepest in use have some hundreds
SHARED_LAYERS = (
    512  # layers or experts of a model, whatever its files hold: layers may share tensors
)
SMALL = 256  # a number that makes no tensor large by itself
UNSTORED = 2**25  # weights that a configuration may describe whatever its files hold
TOKEN = 2**12  # characters of one token of a vocabulary; the longest in use have some hundreds
TOKEN_WORK = 2**31  # the sum of squared lengths over a vocabulary: what finding its merges costs
ID_LIST = 2**30  # bytes of a list of ids or tokens
TEMPLATE = 2**20  # bytes of a chat template; the longest in use have some thousands
GRAMMAR = 2**18  # characters of a JSON schema, a regular expression or a grammar
NAME = 2**16  # characters of a tensor's or a key's name
KEYS = 2**16  # keys of a GGUF file; the largest have some hundreds
TENSORS = 2**20  # of a GGUF file
RANKS_METADATA = 512 * 2**20  # bytes of the list of a checkpoint of many ranks
