"""Where weights come from: built-in names, fetching, GGUF and safetensors reading."""
