"""Tools that a policy may call: typed functions turned into JSON-schema tools."""
