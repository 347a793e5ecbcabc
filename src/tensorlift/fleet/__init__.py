"""Who has which weights, of many instances: registries, seeds that announce themselves, forks that ask."""
