"""Ways for ranks to talk: one interface, one module a backend."""
