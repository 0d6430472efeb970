def adopt(value):
    return None
