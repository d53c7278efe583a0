"""Print the kind and the count of what this machine can train on, for launchers: "cuda 8"."""

from difftrain.device.choice import probe

if __name__ == "__main__":
    print(probe())
