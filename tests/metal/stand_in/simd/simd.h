// Nothing of Apple's simd library is used.
