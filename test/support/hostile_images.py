def try_images(word, verbose):
    raise NotImplementedError
