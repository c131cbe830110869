"""The device plugin: offers the GPUs of Kiwi's daemons to Kubernetes, several places on each.

===========  ===================================================================================
``process``  ``kiwi device-plugin``: puts the parts together, and ends them
``kubelet``  the socket in the kubelet's directory, and the registration
``others``   other device plugins on this node that hand out NVIDIA's GPUs
``service``  answers the kubelet's calls
``watch``    asks the daemons again and again which GPUs can be offered
``label``    tells Node Feature Discovery the wait of this node
``places``   pure: the places of each GPU, and which of them a container gets
``sharing``  reads the sharing part of NVIDIA's configuration file
``api``      the messages of the kubelet's interface
``files``    files that are written whole or not at all
===========  ===================================================================================

Needs the extra ``kubernetes`` (grpcio, protobuf, PyYAML), and no access to the cluster's API.
"""

from typing import Final

REPLICAS_MAX: Final = 1000
"""Most places on each GPU: the list of 16 such GPUs is far below the 4 MiB of a gRPC message. The
command line needs it without the extra."""
