"""FastAPI routes as methods of the deployment's class."""

from typing import Optional

from fastapi import FastAPI, HTTPException, Query
from pydantic import BaseModel, Field
from ray import serve

app_ = FastAPI(title="shop")


class Item(BaseModel):
    name: str
    price: float = Field(gt=0)
    tags: list[str] = []


@serve.deployment
@serve.ingress(app_)
class Shop:
    def __init__(self, owner: str):
        self.owner = owner
        self.items = {}

    @app_.get("/")
    def root(self):
        return {"owner": self.owner, "items": len(self.items)}

    @app_.put("/items/{number}", status_code=201)
    async def put(self, number: int, item: Item) -> Item:
        self.items[number] = item
        return item

    @app_.get("/items/{number}", response_model=Item, response_model_exclude={"tags"})
    def get(self, number: int):
        if number not in self.items:
            raise HTTPException(404, detail=f"no item {number}", headers={"x-why": "missing"})
        return self.items[number]

    @app_.get("/search")
    async def search(self, q: Optional[str] = None, most: int = Query(10, le=20)):
        return {"q": q, "most": most, "found": [each.name for each in self.items.values() if q and q in each.name]}


app = Shop.bind("Ada")
REQUESTS = [
    {"path": "/"},
    {"method": "PUT", "path": "/items/1", "json": {"name": "tea", "price": 3}},
    {"method": "PUT", "path": "/items/2", "json": {"name": "teapot", "price": 30.5, "tags": ["new"]}},
    {"method": "PUT", "path": "/items/3", "json": {"name": "air", "price": 0}},
    {"path": "/items/1"},
    {"path": "/items/9"},
    {"path": "/items/x"},
    {"path": "/search?q=tea&most=5"},
    {"path": "/search?most=50"},
    {"method": "POST", "path": "/items/1"},
    {"path": "/nowhere"},
]
