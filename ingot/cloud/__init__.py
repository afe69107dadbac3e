"""Google's cloud clients behind one thin module per service; machines, prices and images.
No torch.
"""
