"""How vectors are found: data, linear methods, training by gradients."""
