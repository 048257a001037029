"""The documents of the REST API, one class each. The daemon fills them in, the command reads them, and the OpenAPI
document is made from them. A member `from_` is called "from" in JSON. A member with a default is left out where it has
that.
"""
