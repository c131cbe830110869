import os

print("placed on", os.environ["CUDA_VISIBLE_DEVICES"])
