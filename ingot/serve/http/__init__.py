"""The HTTP surface: request bodies, routes, error answers, limits and the listening socket."""
