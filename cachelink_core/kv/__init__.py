"""Key and value caches of real models: content space, geometry, the preallocated prefix cache."""
