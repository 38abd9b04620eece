"""Several replicas behind one address: where they run, and which one answers."""
