"""The parts of the llama.cpp body: the library, its memory of sequences, the file it runs."""
