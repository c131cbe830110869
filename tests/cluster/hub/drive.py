"""Drive a hub as its users do. Runs in /opt/kiwi's Python, on the hub's machine.

drive.py run NOTEBOOK.py USER…    start servers, run the cells (split by "# %%") in all at once
drive.py start USER…              start servers, if they do not run
drive.py kernel USER              start one more kernel, which runs nothing
drive.py kernels USER             print the ids of its kernels; the server counts that as activity
drive.py server USER              ask the hub only; print "runs" or "none"
drive.py stop USER…
drive.py form USER                log in with the password and print the options page's places
drive.py place USER KEY           start a server on a place; print "refused" if the hub does so
"""

import asyncio
import html
import re
import sys
import uuid
from pathlib import Path

import aiohttp

HUB = "http://127.0.0.1:8000"
API = f"{HUB}/hub/api/users"
CHECK = {"Authorization": "token " + "t" * 40}
READY_WITHIN_S = 100.0


async def start(http, user, options=None):
    """Start a server, if it does not run. Return the headers of its user, or None if the hub
    refuses."""
    await http.post(f"{API}/{user}", headers=CHECK)
    if not await server_of(http, user):
        async with http.post(f"{API}/{user}/server", headers=CHECK, json=options or {}) as answer:
            if answer.status not in (201, 202):
                print(f"{user}: refused, {answer.status} {(await answer.text())[:200]}")
                return None
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            server = await server_of(http, user)
            if server and server["ready"]:
                break
            if not server:
                print(f"{user}: refused, its server did not start")
                return None
            await asyncio.sleep(0.3)
    return await headers_of(http, user)


async def server_of(http, user):
    """Return what the hub says about the user's server, None if it has none."""
    async with http.get(f"{API}/{user}", headers=CHECK) as answer:
        return (await answer.json())["servers"].get("")


async def headers_of(http, user):
    async with http.post(f"{API}/{user}/tokens", headers=CHECK, json={"note": "check"}) as answer:
        return {"Authorization": f"token {(await answer.json())['token']}"}


async def notebook(http, user, headers, code):
    base = f"{HUB}/user/{user}/api"
    wanted = {
        "path": "n.ipynb",
        "name": "n.ipynb",
        "type": "notebook",
        "kernel": {"name": "python3"},
    }
    async with http.post(f"{base}/sessions", headers=headers, json=wanted) as answer:
        kernel = (await answer.json())["kernel"]["id"]
    url = f"{base}/kernels/{kernel}/channels".replace("http", "ws", 1)
    async with http.ws_connect(url, headers=headers, max_msg_size=0) as ws:
        for cell in code.split("# %%"):
            await ws.send_json(request(user, ident := uuid.uuid4().hex, cell.strip()))
            async for raw in ws:
                message = raw.json()
                kind, content = message["msg_type"], message["content"]
                if message["parent_header"].get("msg_id") != ident:
                    continue
                if kind == "stream":
                    print(f"{user}: {content['text'].strip()}", flush=True)
                elif kind == "error":
                    print(f"{user}: {content['ename']}: {content['evalue']}", flush=True)
                elif kind == "status" and content["execution_state"] == "idle":
                    break
    await surfaces(http, user, headers)


def request(user, ident, code):
    header = {"msg_id": ident, "msg_type": "execute_request", "username": user, "session": ident,
              "version": "5.3", "date": ""}  # fmt: skip
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {},
               "allow_stdin": False}  # fmt: skip
    return {"channel": "shell", "header": header, "parent_header": {}, "metadata": {},
            "content": content}  # fmt: skip


async def surfaces(http, user, headers):
    """Ask the server what its user may see and do."""
    base = f"{HUB}/user/{user}/kiwi/api"
    async with http.get(f"{base}/status", headers=headers) as answer:
        gpus = (await answer.json())["gpus"]
    for gpu in gpus:
        for session in gpu["sessions"]:
            print(f"{user} sees on GPU {gpu['index']}: {session['name']} of {session['owner']}")
            if not session["mine"]:
                url = f"{base}/gpus/{gpu['uuid']}/sessions/{session['id']}/release"
                async with http.post(url, headers=headers) as answer:
                    print(f"{user} releases another's session: {answer.status}")
        url = f"{base}/gpus/{gpu['uuid']}"
        async with http.patch(url, headers=headers, json={"tq_s": 1}) as answer:
            print(f"{user} sets the quantum: {answer.status}")


async def kernels(http, user):
    headers = await headers_of(http, user)
    async with http.get(f"{HUB}/user/{user}/api/kernels", headers=headers) as answer:
        print(*(kernel["id"] for kernel in await answer.json()))


async def form(http, user):
    async with http.get(f"{HUB}/hub/login") as answer:
        xsrf = re.search(r'name="_xsrf"[^>]*value="([^"]*)"', await answer.text())[1]
    data = {"username": user, "password": "kiwi", "_xsrf": xsrf}
    await http.post(f"{HUB}/hub/login", data=data)
    async with http.get(f"{HUB}/hub/spawn") as answer:
        page = await answer.text()
    for state, words in re.findall(r'name="kiwi_place"[^>]*" ?(\w*)><label[^>]*>([^<]*)', page):
        print(html.unescape(words), state)


async def main():
    what, *words = sys.argv[1:]
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        if what == "run":
            path, *users = words
            found = await asyncio.gather(*(start(http, user) for user in users))
            code = Path(path).read_text()
            both = [n for n in zip(users, found, strict=True) if n[1]]
            await asyncio.gather(*(notebook(http, *each, code) for each in both))
        elif what == "start":
            await asyncio.gather(*(start(http, user) for user in words))
        elif what == "kernel":
            headers = await headers_of(http, words[0])
            await http.post(f"{HUB}/user/{words[0]}/api/kernels", headers=headers)
        elif what == "kernels":
            await kernels(http, words[0])
        elif what == "server":
            print("runs" if await server_of(http, words[0]) else "none")
        elif what == "stop":
            for user in words:
                await http.delete(f"{API}/{user}/server", headers=CHECK)
        elif what == "form":
            await form(http, *words)
        elif what == "place" and await start(http, words[0], {"kiwi_place": words[1]}):
            print(f"{words[0]}: started")


asyncio.run(main())
